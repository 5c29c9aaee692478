"""Parts that any process of the cluster needs: HTTP servers and clients, TLS, secrets, signals, logs and limits."""
