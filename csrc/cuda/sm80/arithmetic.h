// What the products of a launch are computed in.
#pragma once

namespace natten_jax::sm80 {

enum class Arithmetic { kFloat16, kBFloat16, kFloat32, kTensorFloat32 };

}  // namespace natten_jax::sm80
