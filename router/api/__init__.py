"""The OpenAI API over HTTP: how a request comes in, its way to an answer, and a room for each part of that."""
