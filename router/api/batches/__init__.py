"""OpenAI's Files and Batch APIs: their routes, over the storage and the runner in router.batch."""
