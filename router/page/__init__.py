"""Chat page at `/`, where a person can talk to the model, and the security headers of HTML pages."""
