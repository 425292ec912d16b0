"""Floor 0, compute: the arithmetic that moves need, in torch and Triton. Knows nothing of tiers or plans.

This file imports nothing and must stay so: with the repository's root on `sys.path`, libraries that look for Hugging
Face's own `kernels` package find this folder instead, and an import or an error here would break them.
"""
