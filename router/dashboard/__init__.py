"""The page at `/dashboard`, and the state of the cluster as one router sees it, which `kvferry top` shows too."""
