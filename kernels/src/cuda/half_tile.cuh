// Products of many rows with weights of few bits: what half_tile.cu and float8_tile.cu have in common.
//
// Order of summation: halves.cuh. A block of 128 threads has 128 outputs of 64 rows, and each of its four warps 64 of 32.
//
// Tensor cores are to be what is waited for, so shared memory is read as little as may be: a warp has as many sums as registers hold, and activations lie there as they
// are, which is less than their parts; two warps cut the same ones, between matrix instructions. What is multiplied two chunks later is on its way meanwhile.
#pragma once
#include "chosen.cuh"
#include "halves.cuh"

constexpr int OUTPUTS = 128, ROWS = 64, THREADS = 128;
typedef RowsOf<ROWS> Rows;
/// A warp's sixteens of outputs and eights of rows.
constexpr int SIXTEENS = 4, EIGHTS = 4;
/// Lanes' eights of a row of a chunk.
constexpr int QUAD = CHUNK / 8;
/// Chunks that are there or on their way.
constexpr int STAGES = 3;

/// A chunk of each output and row. What eight lanes read at once is in different banks: weights in their order, or if they were converted as a lane's operands of each
/// sixteen outputs and step; and of activations the fours, in every other row each two of them changed over.
struct Stage {
  union {
    uint4 w[OUTPUTS][QUAD], operands[OUTPUTS / 16][2][32];
  };
  float4 x[ROWS][2 * QUAD];
};
/// Rows are there before the first chunk comes and after the last one.
union Room {
  Stage stages[STAGES];
  Rows rows;
};

/// Times that a thread brings eight weights and four activations of a chunk.
constexpr int EACH_W = OUTPUTS * QUAD / THREADS, EACH_X = ROWS * 2 * QUAD / THREADS;

/// Whether weights are converted on their way into shared memory, not by each warp.
template <class W> constexpr bool CONVERTED = sizeof(typename W::Stored) == 1;

/// What a thread brings of each chunk: eight weights of every so many outputs, of which the first is there, and fours of activations. Weights that are converted are of
/// outputs that are lanes' operands together.
template <class W> struct Source {
  DEVICE int output(int i) { return CONVERTED<W> ? i / 2 * 64 + i % 2 * 8 : i * (THREADS / QUAD); }
  const typename W::Stored* w;
  /// Outputs from its first one on; the others have zeros.
  int outputs;
  const float* x;
  long long x_stride;
  /// Rows of `x`. A row that is none reads the first one's numbers, and nobody what becomes of them.
  int from[EACH_X];
  int k;
  /// Whether rows can be loaded by eights, and how far apart they are is a word.
  bool wide;
};

/// The matrix of a block, its first output in it, and which rows or group it has.
template <class W> struct Share {
  const typename W::Stored* w;
  float* out;
  long long out_stride;
  int n, number, first, down;
};

/// From that of the first matrix. Where all rows have the same weights (`alike`), blocks that follow each other have the same outputs of up to BAND · ROWS rows.
template <class W> DEVICE Share<W> place_of_block(Share<W> place, const Further& further, bool alike) {
  int block = blockIdx.x;
  // What comes of it is computed again where it is needed again.
  keep(block);
  place.number = 0, place.down = blockIdx.y;
  if (alike) {
    Turned turned = Turned::of(block);
    block = turned.across, place.down = turned.down;
  }
  place.first = matrix_at(block, further, OUTPUTS, place.w, place.out, place.out_stride, place.n, place.number) * OUTPUTS;
  return place;
}

/// Activations of a chunk, and weights that need no conversion.
template <class W> DEVICE void ask(Stage& stage, Source<W>& of, int chunk) {
  unsigned tid = threadIdx.x, quarter = tid % QUAD, eighth = tid % (2 * QUAD), row = tid / (2 * QUAD);
  int at_w = chunk * CHUNK + quarter * 8, at_x = chunk * CHUNK + eighth * 4;
  // A thread's rows are all odd or all even.
  float4* to_x = &stage.x[row][eighth ^ row % 2];
  uint4* to_w = &stage.w[tid / QUAD][quarter];
  const typename W::Stored* w = of.w + at_w;
  // What comes of them is for this chunk only, or it would take registers.
#pragma unroll
  for (int i = 0; i < EACH_X; i++) keep(of.from[i]);
  if (of.wide) {
#pragma unroll
    for (int i = 0; i < EACH_X; i++)
      bring_16<128>(to_x + i * THREADS, reinterpret_cast<const char*>(of.x + at_x) + word64(unsigned(of.from[i])) * uint32_t(4 * of.x_stride), at_x < of.k);
    if constexpr (!CONVERTED<W>) {
#pragma unroll
      for (int i = 0; i < EACH_W; i++) bring_16<128>(to_w + i * THREADS, w + size_t(of.k) * of.output(i), at_w < of.k && of.output(i) < of.outputs);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < EACH_X; i++)
#pragma unroll 1
    for (int j = 0; j < 4; j++) reinterpret_cast<float*>(to_x + i * THREADS)[j] = at_x + j < of.k ? of.x[unsigned(of.from[i]) * of.x_stride + at_x + j] : 0.0f;
  if constexpr (!CONVERTED<W>) {
#pragma unroll 1
    for (int i = 0; i < EACH_W; i++)
#pragma unroll 1
      for (int j = 0; j < 8; j++) reinterpret_cast<uint16_t*>(to_w + i * THREADS)[j] = at_w + j < of.k && of.output(i) < of.outputs ? w[size_t(of.k) * of.output(i) + j] : 0;
  }
}

template <bool YES> struct Yes {
  static constexpr bool value = YES;
};

/// Weights of a chunk that are converted.
template <class W> DEVICE void bring(typename W::Eight (&brought)[EACH_W], const Source<W>& of, int chunk) {
  int at = chunk * CHUNK + threadIdx.x % QUAD * 8;
  auto each = [&](auto wide) {
#pragma unroll
    for (int i = 0; i < EACH_W; i++) brought[i] = eight_weights<wide.value>(of.w + size_t(of.k) * of.output(i), at, of.output(i) < of.outputs ? of.k : 0);
  };
  if (of.wide) each(Yes<true>());
  else each(Yes<false>());
}
/// As `cut`, of weights that are numbers.
DEVICE void cut_numbers(const uint2& w, uint32_t (&parts)[1][4]) {
  const uint32_t words[2] = {w.x, w.y};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t pair = __byte_perm(words[i / 2], 0, i % 2 ? 0x3424 : 0x1404);
    parts[0][i] = times_2_120((pair >> 4 & 0x07f007f0u) | (pair & 0x80008000u));
  }
}

template <class W> DEVICE void put(Stage& stage, typename W::Eight (&brought)[EACH_W]) {
  int tid = threadIdx.x;
  uint32_t none = 0;
#pragma unroll
  for (int i = 0; i < EACH_W; i++) none |= ((brought[i].x & 0x7f7f7f7fu) + 0x01010101u) | ((brought[i].y & 0x7f7f7f7fu) + 0x01010101u);
  auto all = [&](auto cut) {
#pragma unroll
    for (int i = 0; i < EACH_W / 2; i++) {
      uint32_t low[1][4], high[1][4];
      cut(brought[2 * i], low), cut(brought[2 * i + 1], high);
#pragma unroll
      for (int step = 0; step < 2; step++)
        stage.operands[tid / 32 + 4 * i][step][tid % 32] = make_uint4(low[0][2 * step], high[0][2 * step], low[0][2 * step + 1], high[0][2 * step + 1]);
    }
  };
  if (__any_sync(ALL, (none & 0x80808080u) != 0)) all([](const uint2& w, uint32_t (&parts)[1][4]) { W::cut(w, parts); });
  else all([](const uint2& w, uint32_t (&parts)[1][4]) { cut_numbers(w, parts); });
}

/// The weights of a lane as parts.
template <class W> DEVICE void parts_of(const uint4& w, uint32_t (&parts)[W::PARTS][4]) {
  if constexpr (W::PARTS == 1) parts[0][0] = by_itself(w.x), parts[0][1] = by_itself(w.y), parts[0][2] = by_itself(w.z), parts[0][3] = by_itself(w.w);
  else W::cut(w, parts);
}

/// As `cut`, of numbers that are finite.
DEVICE void cut_finite(const float (&x)[8], uint32_t (&parts)[PARTS_OF_X][4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float middle[2], rest[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      middle[j] = x[2 * i + j] - upper_part(x[2 * i + j]);
      rest[j] = middle[j] - upper_part(middle[j]);
    }
    parts[0][i] = upper_halves(x[2 * i], x[2 * i + 1]);
    parts[1][i] = upper_halves(middle[0], middle[1]);
    parts[2][i] = upper_halves(rest[0], rest[1]);
  }
}

/// Where in a stage a lane finds its numbers, in sixteens of bytes: weights of its warp's first output, or operands, and one of its two fours of
/// the first row, beside which the other is.
struct Places {
  int w, x;
};

template <class W> DEVICE void numbers_of(const uint4* stage, const Places& at, int eight, float scale, float (&x)[8]) {
  const float4* fours = reinterpret_cast<const float4*>(stage);
  float4 low = fours[at.x + eight * 8 * 2 * QUAD], high = fours[(at.x ^ 1) + eight * 8 * 2 * QUAD];
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  take_on<W>(x, scale);
}

/// A warp's products of a chunk, of so many eights of rows, of whose numbers `cut` makes parts. Eights are cut while others are multiplied.
template <class W, int SOME, class Cut> DEVICE void products(float (&sums)[SIXTEENS][EIGHTS][4], const uint4* stage, const Places& at, const float (&numbers)[SOME][8], const Cut& cut) {
  // Weights of two parts take the registers of more than one sixteen.
  constexpr int HELD = W::PARTS == 1 ? SIXTEENS : 1, CUT = W::PARTS == 1 ? 2 : SOME;
#pragma unroll
  for (int m = 0; m < SIXTEENS; m += HELD) {
    // Of both steps, as the instructions want them.
    unsigned a[2][W::PARTS][HELD][4];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      if constexpr (CONVERTED<W>) {
#pragma unroll
        for (int step = 0; step < 2; step++) {
          uint4 words = stage[at.w + ((m + i) * 2 + step) * 32];
          a[step][0][i][0] = words.x, a[step][0][i][1] = words.y, a[step][0][i][2] = words.z, a[step][0][i][3] = words.w;
        }
      } else {
        uint32_t low[W::PARTS][4], high[W::PARTS][4];
        parts_of<W>(stage[at.w + (m + i) * 16 * QUAD], low), parts_of<W>(stage[at.w + ((m + i) * 16 + 8) * QUAD], high);
#pragma unroll
        for (int p = 0; p < W::PARTS; p++)
#pragma unroll
          for (int word = 0; word < 4; word++) a[word / 2][p][i][word % 2 * 2] = low[p][word], a[word / 2][p][i][word % 2 * 2 + 1] = high[p][word];
      }
    }
#pragma unroll
    for (int first = 0; first < SOME; first += CUT) {
      uint32_t x[2][CUT][PARTS_OF_X][2];
#pragma unroll
      for (int j = 0; j < CUT; j++) {
        uint32_t parts[PARTS_OF_X][4];
        cut(numbers[first + j], parts);
#pragma unroll
        for (int q = 0; q < PARTS_OF_X; q++)
#pragma unroll
          for (int i = 0; i < 4; i++) x[i / 2][j][q][i % 2] = parts[q][i];
      }
#pragma unroll
      for (int step = 0; step < 2; step++)
#pragma unroll
        for (int p = 0; p < W::PARTS; p++) mma_bf16_all<HELD, CUT, PARTS_OF_X, EIGHTS>(sums + m, first, a[step][p], x[step]);
    }
  }
}

/// The same, with parts as the numbers want them.
template <class W, int SOME> DEVICE void products(float (&sums)[SIXTEENS][EIGHTS][4], const Stage& of, const Places& at, float scale) {
  const uint4* stage = reinterpret_cast<const uint4*>(&of);
  float numbers[SOME][8];
  uint32_t odd = 0;
#pragma unroll
  for (int j = 0; j < SOME; j++) {
    numbers_of<W>(stage, at, j, scale, numbers[j]);
    uint32_t of_eight = 0;
#pragma unroll
    for (int i = 0; i < 8; i += 2) of_eight = add_none_of(upper_halves(numbers[j][i], numbers[j][i + 1]), of_eight);
    odd |= of_eight;
  }
  if (__any_sync(ALL, (odd & 0x7fff7fffu) != 0)) products<W, SOME>(sums, stage, at, numbers, [](const float (&x)[8], uint32_t (&parts)[PARTS_OF_X][4]) { cut(x, parts); });
  else products<W, SOME>(sums, stage, at, numbers, [](const float (&x)[8], uint32_t (&parts)[PARTS_OF_X][4]) { cut_finite(x, parts); });
}

/// The outputs of a block. `place` and `values` tell what it has and its scales, and `rows` puts its rows into the room, each as often as they are called.
template <class W, class PlaceOf, class RowsOf, class ValuesOf>
DEVICE void product(Room& room, const PlaceOf& place_of, const RowsOf& rows_of, const ValuesOf& values_of, const float* x, long long x_stride, int k, const Scales& scales) {
  unsigned tid = threadIdx.x, of_w = tid / 32 % 2 * 64, of_x = tid / 64 * 32, g = tid % 32 / 4, t = tid % 4;
  Source<W> source;
  Places at;
  int eights;
  const float* band;
  {
    Share<W> place = place_of();
    if (place.first >= place.n || !rows_of(place)) return;
    const float* values = nullptr;
    if (!values_of(place, values)) k = 0;
    eights = room.rows.eights(of_x, EIGHTS);
    int output = CONVERTED<W> ? tid / 32 * 16 + tid % 32 / QUAD : tid / QUAD;
    source.x = x, source.x_stride = x_stride, source.k = k, source.wide = is_wide(place.w, x, x_stride, k) && x_stride < 1 << 30;
    source.outputs = place.n - place.first - output;
    source.w = place.w + size_t(place.first + output) * k;
#pragma unroll
    for (int i = 0; i < EACH_X; i++) {
      int from = room.rows.from[tid / (2 * QUAD) + i * (THREADS / (2 * QUAD))];
      source.from[i] = from >= 0 ? from : room.rows.from[0];
    }
    // A warp's outputs are within the height of one scale.
    band = band_of(scales, values, min(place.first + int(of_w), place.n - 1));
    unsigned row = of_x + g;
    at.w = CONVERTED<W> ? of_w / 16 * 2 * 32 + tid % 32 : (of_w + g) * QUAD + t, at.x = OUTPUTS * QUAD + row * 2 * QUAD + 2 * t + row % 2;
    keep(at.w), keep(at.x);
    __syncthreads();
  }
  int chunks = (k + CHUNK - 1) / CHUNK;
  float sums[SIXTEENS][EIGHTS][4] = {}, all[SIXTEENS][EIGHTS][4] = {};
  typename W::Eight brought[CONVERTED<W> ? EACH_W : 1];
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (i < chunks) ask(room.stages[i], source, i);
    close_group();
  }
  if constexpr (CONVERTED<W>) bring<W>(brought, source, 0), put<W>(room.stages[0], brought);
  Walk walk(scales, band, 0);
#pragma unroll 1
  for (int chunk = 0, left = chunks_of_range(k), stage = 0; chunk < chunks; chunk++) {
    // The warps are through with the chunk before.
    await_groups<STAGES - 2>();
    __syncthreads();
    int next = stage + 1 < STAGES ? stage + 1 : 0, last = stage > 0 ? stage - 1 : STAGES - 1;
    if constexpr (CONVERTED<W>) bring<W>(brought, source, chunk + 1);
    if (chunk + STAGES - 1 < chunks) ask(room.stages[last], source, chunk + STAGES - 1);
    close_group();
    if (eights > 2) products<W, 4>(sums, room.stages[stage], at, walk.now);
    else if (eights > 0) products<W, 2>(sums, room.stages[stage], at, walk.now);
    if constexpr (CONVERTED<W>) put<W>(room.stages[next], brought);
    if constexpr (W::SCALED) walk.next(scales, chunk + 1 < chunks);
    if (--left == 0 || chunk + 1 == chunks) {
      // Or how many there are would take a register all the time.
      int of = k;
      keep(of);
      left = chunks_of_range(of);
#pragma unroll
      for (int m = 0; m < SIXTEENS; m++)
#pragma unroll
        for (int j = 0; j < EIGHTS; j++)
#pragma unroll
          for (int i = 0; i < 4; i++) all[m][j][i] += sums[m][j][i], sums[m][j][i] = 0.0f;
    }
    stage = next;
  }
  __syncthreads();
  Share<W> place = place_of();
  rows_of(place);
  const float* values = nullptr;
  values_of(place, values);
#pragma unroll
  for (int j = 0; j < EIGHTS; j++)
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      int row = room.rows.to[of_x + 8 * j + 2 * t + odd];
      if (row < 0) continue;
#pragma unroll
      for (int m = 0; m < SIXTEENS; m++)
#pragma unroll
        for (int high = 0; high < 2; high++) {
          int output = place.first + int(of_w + 16 * m + 8 * high + g);
          if (output >= place.n) continue;
          float sum = all[m][j][2 * high + odd];
          if constexpr (W::SCALED) sum = with_scale(sum, scales, values, output);
          place.out[row * place.out_stride + output] = plain(sum);
        }
    }
}
