"""POST /v1/audio/transcriptions and /v1/audio/translations: speech to text on nodes with a speech engine."""
