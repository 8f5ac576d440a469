"""Compares methods under one protocol: plan, runs, tables and report page."""
