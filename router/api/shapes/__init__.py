"""What answers look like that come from a generation: what shapes share, chats and completions."""
