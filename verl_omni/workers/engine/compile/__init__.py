"""What speeds the transformer blocks up: compiling, attention kernels, fused activations."""
