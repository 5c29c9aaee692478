"""What prefill and decode processes share: engine, link, lease and HTTP joined into one running node."""
