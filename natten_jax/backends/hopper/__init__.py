"""The ``hopper`` backend: ``backend`` has its tiles and its forward pass, ``backward`` the calls of the other.

``seams`` says how much longer tiles take where dimensions wrap.
"""
