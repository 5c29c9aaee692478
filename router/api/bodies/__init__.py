"""Request bodies: reading and parsing, fields shared by endpoints, and translation into prompts and parameters."""
