"""Where a step's time goes: traces of PyTorch's profiler and of Nsight Systems, and Megatron's timers by stage."""
