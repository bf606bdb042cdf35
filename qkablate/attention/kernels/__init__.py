"""Attention kernels: dispatch, blocked softmax attention, linear layers."""
