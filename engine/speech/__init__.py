"""Speech models: audio decoding, Whisper's encoder and decoder, batched decoding of windows, and transcripts."""
