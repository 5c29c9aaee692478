"""What any process of the cluster needs: an HTTP server, the status pipe, signals."""
