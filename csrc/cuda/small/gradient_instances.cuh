// Instantiates the kernels of gradients for one element type and feature.
#pragma once

#include "cuda/small/key_value_gradient_instances.cuh"
#include "cuda/small/query_gradient_instances.cuh"
#include "cuda/small/whole_gradient_instances.cuh"
