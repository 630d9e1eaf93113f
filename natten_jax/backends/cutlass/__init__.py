"""The ``cutlass`` backend: ``backend`` has its tiles and general kernels, ``small_windows`` those for small windows."""
