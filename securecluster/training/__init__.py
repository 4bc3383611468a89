"""Local training of many clients in one batch, DP-SGD and evaluation."""
