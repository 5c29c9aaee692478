"""Location of models and parsing of their files, without torch."""
