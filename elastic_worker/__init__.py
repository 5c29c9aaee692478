"""Elastic worker: a process that is a prefill or a decode node and can switch roles."""
