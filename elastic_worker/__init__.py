"""The process that is a prefill node or a decode node, and may become the other one."""
