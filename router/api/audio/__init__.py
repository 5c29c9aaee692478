"""Endpoints of audio: transcriptions and translations of speech."""
