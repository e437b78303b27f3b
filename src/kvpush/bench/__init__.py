"""Workloads, paired comparisons and reports."""
