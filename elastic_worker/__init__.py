"""Elastic node: a process that is a prefill or a decode node and can switch between the roles."""
