"""Attention patterns as tables of spans, and the executors that compute them on one device."""
