"""Runtime of every process: HTTP server, addresses, status pipe, signals, logs and limits."""
