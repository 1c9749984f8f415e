"""A small stand-in for verl: the names, signatures and calls that the integration meets, and nothing else."""

from __future__ import annotations
