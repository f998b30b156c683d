"""Cells of real processes under faults: what runs, what attacks them, and their judge."""
