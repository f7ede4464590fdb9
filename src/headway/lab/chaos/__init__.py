"""Fault campaigns: train under kills, lost disks and changes, and compare the end with an undisturbed run.

An application: only `cli` imports it. Its door is `report.run_campaign`.
"""
