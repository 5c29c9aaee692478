"""Who asks: keys and limits of tenants, and the queue in which their requests wait for a turn."""
