"""Feature maps, the mathematical kernels of linear attention. `FEATURE_MAPS` lists them by name."""
