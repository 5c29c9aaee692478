"""What any process of the cluster needs: an HTTP server, addresses, the status pipe, signals."""
