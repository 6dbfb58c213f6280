"""Tests: unit (pure, fast), integration (real processes), parity (against torchrun), chaos."""
