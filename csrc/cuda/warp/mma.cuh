// Matrix products of one warp with mma.sync: operands from shared memory or registers, accumulators in float32.
//
// A warp multiplies blocks of 16 rows (operand A) with blocks of 16 columns (operand B) in k-steps of 32 bytes. In an
// accumulator of 16 x 8, a lane's element e is in row lane / 4 + 8 * (e / 2) and column 2 * (lane % 4) + e % 2.
#pragma once

#include <cute/arch/mma_sm80.hpp>

#include "cuda/common/arithmetic.cuh"
#include "cuda/warp/shared_tile.cuh"

namespace natten_jax {

/// mma.sync instruction for 16-bit elements.
template <class Element>
struct HalfInstruction;
template <>
struct HalfInstruction<cutlass::half_t> : cute::SM80_16x8x16_F32F16F16F32_TN {};
template <>
struct HalfInstruction<cutlass::bfloat16_t> : cute::SM80_16x8x16_F32BF16BF16F32_TN {};

/// Reads rows of A from a tile that stores them as rows.
template <class A, class Tile>
struct ReadRowsOfA {
  typename Tile::Lane lane;
  CUTE_DEVICE ReadRowsOfA(std::uint32_t tile, int row) : lane(tile, row + threadIdx.x % 16, threadIdx.x % 32 / 16) {}
  CUTE_DEVICE void operator()(A& a, int rows, int step) const { a.load(lane.at(rows, 2 * step)); }
};
/// Reads columns of B from a tile that stores them as rows. The tile is `offset` bytes after the tile that was passed
/// to the constructor.
template <class B, class Tile>
struct ReadRowsOfB {
  typename Tile::Lane lane;
  CUTE_DEVICE ReadRowsOfB(std::uint32_t tile, int row)
      : lane(tile, row + threadIdx.x % 32 / 16 * 8 + threadIdx.x % 8, threadIdx.x / 8 % 2) {}
  CUTE_DEVICE void operator()(B& b, int rows, int step, std::uint32_t offset = 0) const {
    b.load(lane.at(rows, 2 * step) + offset);
  }
};

/// Products of 16-bit elements.
template <class Element>
struct HalfProduct {
  static constexpr int kStep = 16;  // elements per k-step

  struct A {
    std::uint32_t r[4];
    CUTE_DEVICE void load(std::uint32_t address) { load_matrices(r, address); }
  };
  struct B {
    std::uint32_t r[2][2];  // two blocks of 8 columns
    CUTE_DEVICE void load(std::uint32_t address) { load_matrices(reinterpret_cast<std::uint32_t (&)[4]>(r), address); }
  };

  template <class Tile>
  using ReadA = ReadRowsOfA<A, Tile>;
  template <class Tile>
  using ReadB = ReadRowsOfB<B, Tile>;
  /// Reads rows of A from a tile that stores them as columns.
  template <class Tile>
  struct ReadTransposedA {
    typename Tile::Lane lane;
    CUTE_DEVICE ReadTransposedA(std::uint32_t tile, int column)
        : lane(tile, threadIdx.x % 32 / 16 * 8 + threadIdx.x % 8, column / 8 + threadIdx.x / 8 % 2) {}
    CUTE_DEVICE void operator()(A& a, int columns, int step) const {
      load_matrices_transposed(a.r, lane.at(kStep * step, columns / 8));
    }
  };
  /// Reads columns of B from a tile that stores them as columns.
  template <class Tile>
  struct ReadTransposedB {
    typename Tile::Lane lane;
    CUTE_DEVICE ReadTransposedB(std::uint32_t tile, int column)
        : lane(tile, threadIdx.x % 16, column / 8 + threadIdx.x % 32 / 16) {}
    CUTE_DEVICE void operator()(B& b, int columns, int step, std::uint32_t offset = 0) const {
      load_matrices_transposed(reinterpret_cast<std::uint32_t (&)[4]>(b), lane.at(kStep * step, columns / 8) + offset);
    }
  };
  template <class Tile>
  using ReadPairedA = ReadA<Tile>;

  /// Converts the accumulators of a row block to an operand A, for one k-step of the next product.
  CUTE_DEVICE static A operand(const float (*c)[4], int step) {
    const float *low = c[2 * step], *high = c[2 * step + 1];
    return {pack<Element>(low[0], low[1]), pack<Element>(low[2], low[3]), pack<Element>(high[0], high[1]),
            pack<Element>(high[2], high[3])};
  }

  CUTE_DEVICE static void store_pair(std::uint32_t address, float low, float high) {
    store_word(address, pack<Element>(low, high));
  }

  template <bool kIsTransposed>
  CUTE_DEVICE static void multiply(float (&c)[4], const A& a, const B& b, int block) {
    HalfInstruction<Element>::fma(c[0], c[1], c[2], c[3], a.r[0], a.r[1], a.r[2], a.r[3], b.r[block][0], b.r[block][1],
                                  c[0], c[1], c[2], c[3]);
  }
};

/// Products of float32 elements on TF32 tensor cores. If `kSplit`, every element is split into a high and a low TF32
/// number. Of the four products of these numbers, three are computed: the product of both low numbers is below
/// float32's precision.
template <bool kSplit>
struct FloatProduct {
  static constexpr int kStep = 8;

  struct Numbers {
    std::uint32_t high[4], low[kSplit ? 4 : 1];

    /// Rounds an element to TF32. Tensor cores ignore the last 13 bits, so adding half of the range of these bits
    /// rounds to nearest.
    CUTE_DEVICE void set(int i, std::uint32_t bits) {
      high[i] = bits + 0x1000u;
      if constexpr (kSplit) {
        high[i] &= 0xffffe000u;
        low[i] = __float_as_uint(__uint_as_float(bits) - __uint_as_float(high[i]));
      }
    }
    CUTE_DEVICE void load(std::uint32_t address) {
      std::uint32_t bits[4];
      load_matrices(bits, address);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) set(i, bits[i]);
    }
  };
  using A = Numbers;
  using B = Numbers;  // two blocks of 8 columns

  /// Four lanes hold a row of A or a column of B, which has eight elements per k-step. With ReadA and ReadB, lane i % 4
  /// of these lanes holds element i. With the other readers, lane i / 2 holds it.
  template <class Tile>
  using ReadA = ReadRowsOfA<A, Tile>;
  template <class Tile>
  using ReadB = ReadRowsOfB<B, Tile>;
  template <class Tile>
  struct ReadPairedA {
    typename Tile::Lane lane;
    CUTE_DEVICE ReadPairedA(std::uint32_t tile, int row) : lane(tile, row + threadIdx.x % 32 / 4, threadIdx.x % 4 / 2) {
      lane.base += threadIdx.x % 2 * 8;
    }
    CUTE_DEVICE void operator()(A& a, int rows, int step) const {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) a.set(i, load_word(lane.at(rows + i % 2 * 8, 2 * step) + i / 2 * 4));
    }
  };
  template <class Tile>
  struct ReadTransposed {
    typename Tile::Lane even, odd;
    CUTE_DEVICE ReadTransposed(std::uint32_t tile, int column)
        : even(tile, threadIdx.x % 4 * 2, column / 4 + threadIdx.x % 32 / 16),
          odd(tile, threadIdx.x % 4 * 2 + 1, column / 4 + threadIdx.x % 32 / 16) {
      even.base += threadIdx.x / 4 % 4 * 4;
      odd.base += threadIdx.x / 4 % 4 * 4;
    }
    CUTE_DEVICE std::uint32_t word(int columns, int step, bool is_odd, std::uint32_t offset = 0) const {
      return load_word((is_odd ? odd : even).at(kStep * step, columns / 4) + offset);
    }
  };
  template <class Tile>
  struct ReadTransposedA : ReadTransposed<Tile> {
    using ReadTransposed<Tile>::ReadTransposed;
    CUTE_DEVICE void operator()(A& a, int columns, int step) const {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) a.set(i, this->word(columns + i % 2 * 8, step, i / 2));
    }
  };
  template <class Tile>
  struct ReadTransposedB : ReadTransposed<Tile> {
    using ReadTransposed<Tile>::ReadTransposed;
    CUTE_DEVICE void operator()(B& b, int columns, int step, std::uint32_t offset = 0) const {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) b.set(i, this->word(columns + i / 2 * 8, step, i % 2, offset));
    }
  };

  CUTE_DEVICE static A operand(const float (*c)[4], int step) {
    A a;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) a.set(i, __float_as_uint(c[step][i % 2 * 2 + i / 2]));
    return a;
  }

  CUTE_DEVICE static void store_pair(std::uint32_t address, float low, float high) { store_words(address, low, high); }

  template <bool kIsTransposed>
  CUTE_DEVICE static void multiply(float (&c)[4], const A& a, const B& b, int block) {
    if constexpr (kSplit) {
      // Tensor cores truncate sums, while float32 addition rounds them. So tensor cores add up the products of only one
      // k-step at a time, and float32 additions add up the k-steps.
      float sum[4] = {};
      multiply(sum, kIsTransposed ? a.high : a.low, kIsTransposed ? b.low : b.high, block);
      multiply(sum, kIsTransposed ? a.low : a.high, kIsTransposed ? b.high : b.low, block);
      multiply(sum, a.high, b.high, block);
      CUTE_UNROLL
      for (int e = 0; e < 4; ++e) c[e] += sum[e];
    } else {
      multiply(c, a.high, b.high, block);
    }
  }

 private:
  CUTE_DEVICE static void multiply(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[4], int block) {
    cute::SM80_16x8x8_F32TF32TF32F32_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b[2 * block],
                                             b[2 * block + 1], c[0], c[1], c[2], c[3]);
  }
};

/// Computes c += a * b, for `kRows` blocks of 16 rows, `kColumns` blocks of 16 columns and `kSteps` k-steps.
///
/// If `kIsTransposed`, the result is bitwise equal to the result that a call without `kIsTransposed` computes after A
/// and B are exchanged.
///
/// Args:
///   read_a: fills an operand A, given a row block and a step.
///   read_b: fills an operand B, given a column block and a step.
template <class Product, int kRows, int kColumns, int kSteps, bool kIsTransposed = false, class ReadA, class ReadB>
CUTE_DEVICE void accumulate(float (&c)[kRows][2 * kColumns][4], const ReadA& read_a, const ReadB& read_b) {
  CUTE_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    typename Product::A a[kRows];
    CUTE_UNROLL
    for (int m = 0; m < kRows; ++m) read_a(a[m], m, step);
    CUTE_UNROLL
    for (int n = 0; n < kColumns; ++n) {
      typename Product::B b;
      read_b(b, n, step);
      CUTE_UNROLL
      for (int m = 0; m < kRows; ++m) {
        Product::template multiply<kIsTransposed>(c[m][2 * n], a[m], b, 0);
        Product::template multiply<kIsTransposed>(c[m][2 * n + 1], a[m], b, 1);
      }
    }
  }
}

}  // namespace natten_jax
