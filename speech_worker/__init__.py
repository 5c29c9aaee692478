"""Node that transcribes speech with kvferry's own Whisper implementation."""
