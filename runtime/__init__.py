"""What any process of the cluster needs: HTTP server and client connections, TLS, secrets, signals, logs, limits."""
