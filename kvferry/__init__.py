"""A disaggregated prefill/decode serving cluster for large language models.

The packages live at the root of the repository; the links beside this file give them their import names.
"""
