"""Request bodies: reading, field groups, and their translation into work for a model."""
