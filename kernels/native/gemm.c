#include "gemm.h"

#include "elements.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define WIDE __attribute__((target("avx512f")))
#define COLUMNS GEMM_COLUMNS /* two vectors */
#define DEEP GEMM_DEEP
#define ROWS 12     /* of a block that stands in registers: with COLUMNS, 24 of the 32 there are */
#define STEP 16     /* numbers of a vector, and between two columns of a packed left block */
#define PACKED 65536 /* numbers of right operand packed at a time: a quarter of a second-level cache of 1 MiB */
#define AHEAD 64    /* numbers that a packed column is fetched ahead */
#define FEW 4       /* rows for which packing does not pay */

static int found = -1, used = 1;

int gemm_find(void)
{
    if (found < 0)
        found = __builtin_cpu_supports("avx512f") && !__builtin_cpu_is("intel");
    return found;
}

int gemm_use(int use)
{
    int was = used;
    used = use;
    return was;
}

/* ---- packing --------------------------------------------------------------------------------------------------------- */

/* sixteen rows of sixteen numbers, turned */
static WIDE INLINED void turn(__m512 row[STEP])
{
    __m512 t[STEP];
#pragma GCC unroll 8
    for (int i = 0; i < STEP; i += 2) {
        t[i] = _mm512_unpacklo_ps(row[i], row[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(row[i], row[i + 1]);
    }
#define PAIRS(a, b) _mm512_castpd_ps(_mm512_unpack##b##_pd(_mm512_castps_pd(t[a]), _mm512_castps_pd(t[(a) + 2])))
#pragma GCC unroll 4
    for (int i = 0; i < STEP; i += 4) {
        row[i] = PAIRS(i, lo), row[i + 1] = PAIRS(i, hi);
        row[i + 2] = PAIRS(i + 1, lo), row[i + 3] = PAIRS(i + 1, hi);
    }
#undef PAIRS
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(row[i], row[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(row[i], row[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(row[i + 8], row[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(row[i + 8], row[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        row[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        row[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
        row[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
        row[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

static __mmask16 first(int64_t count)
{
    return count >= STEP ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
}

/* to[k * COLUMNS + column], zeros beyond `count` columns. Columns lie side by side. Nothing is read where nothing is, not
   even under an empty mask: a processor may take hundreds of cycles to find that it need not. */
static WIDE void pack_rows(float *to, const float *from, int64_t stride, int64_t deep, int64_t count)
{
    __mmask16 low = first(count), high = first(count - STEP);
    int64_t second = high ? STEP : 0;
    for (int64_t k = 0; k < deep; k++, from += stride, to += COLUMNS) {
        _mm512_store_ps(to, _mm512_maskz_loadu_ps(low, from));
        _mm512_store_ps(to + STEP, _mm512_maskz_loadu_ps(high, from + second));
    }
}

/* Likewise, where the numbers of a column lie side by side. */
static WIDE void pack_columns(float *to, const float *from, int64_t stride, int64_t deep, int64_t count)
{
    __m512 block[STEP];
    for (int64_t half = 0; half < COLUMNS; half += STEP)
        for (int64_t k = 0; k < deep; k += STEP) {
            __mmask16 there = first(deep - k);
#pragma GCC unroll 16
            for (int i = 0; i < STEP; i++) {
                const float *column = from + (half + i < count ? half + i : 0) * stride + k;
                block[i] = _mm512_maskz_loadu_ps(half + i < count ? there : 0, column);
                __builtin_prefetch(column + AHEAD);
            }
            turn(block);
            float *at = to + k * COLUMNS + half;
            int64_t rows = deep - k < STEP ? deep - k : STEP;
            for (int i = 0; i < rows; i++)
                _mm512_store_ps(at + i * COLUMNS, block[i]);
        }
}

/* to[k * STEP + row], of `count` rows that lie side by side. */
static WIDE void pack_left(float *to, const float *from, int64_t stride, int64_t deep, int64_t count)
{
    __mmask16 there = first(count);
    for (int64_t k = 0; k < deep; k++)
        _mm512_store_ps(to + k * STEP, _mm512_maskz_loadu_ps(there, from + k * stride));
}

/* ---- a block --------------------------------------------------------------------------------------------------------- */

/* One block of the result. down, along: the left operand's strides. */
typedef struct {
    const float *left, *right;
    float *out;
    int64_t down, along, deep, stride;
    __mmask16 low, high;
    int add;
} Block;

static WIDE INLINED void put(float *out, __mmask16 there, __m512 sum, int add)
{
    _mm512_mask_storeu_ps(out, there, add ? _mm512_add_ps(sum, _mm512_maskz_loadu_ps(there, out)) : sum);
}

/* Four rows share a pointer, so that all of them have registers. */
static WIDE INLINED void run_block(const Block *block, const int rows)
{
    __m512 sum[ROWS][2];
    int64_t down = block->down, triple = 3 * down;
    const float *a0 = block->left, *a4 = a0 + 4 * down, *a8 = a0 + 8 * down, *b = block->right;
    float *out = block->out;
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        sum[i][0] = sum[i][1] = _mm512_setzero_ps();
        __builtin_prefetch(out + i * block->stride, 1); /* there by the time the sums are */
        __builtin_prefetch(out + i * block->stride + STEP, 1);
    }
    for (int64_t k = 0; k < block->deep; k++) {
        __m512 b0 = _mm512_load_ps(b), b1 = _mm512_load_ps(b + STEP);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            const float *from = i < 4 ? a0 : i < 8 ? a4 : a8;
            __m512 a = _mm512_set1_ps(from[i % 4 == 3 ? triple : i % 4 * down]);
            sum[i][0] = _mm512_fmadd_ps(a, b0, sum[i][0]);
            sum[i][1] = _mm512_fmadd_ps(a, b1, sum[i][1]);
        }
        a0 += block->along, a4 += block->along, a8 += block->along, b += COLUMNS;
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++, out += block->stride) {
        put(out, block->low, sum[i][0], block->add);
        if (block->high)
            put(out + STEP, block->high, sum[i][1], block->add);
    }
}

#define BLOCK(rows) \
    static WIDE void block_##rows(const Block *block) { run_block(block, rows); }
BLOCK(1) BLOCK(2) BLOCK(3) BLOCK(4) BLOCK(5) BLOCK(6) BLOCK(7) BLOCK(8) BLOCK(9) BLOCK(10) BLOCK(11) BLOCK(12)
static void (*const blocks[ROWS])(const Block *) = {block_1, block_2, block_3, block_4,  block_5,  block_6,
                                                    block_7, block_8, block_9, block_10, block_11, block_12};

/* ---- a product ------------------------------------------------------------------------------------------------------- */

/* Blocks of rows differ by one row at most. */
void gemm_packed(float *out, int64_t stride, const float *left, int64_t down, int64_t along, int64_t rows,
                 const float *right, int64_t panel, int64_t deep, int64_t columns, int add)
{
    float packed[DEEP * STEP] __attribute__((aligned(64)));
    int64_t parts = (rows + ROWS - 1) / ROWS;
    for (int64_t part = 0; part < parts; part++) {
        int64_t row = rows * part / parts, height = rows * (part + 1) / parts - row;
        Block block = {left + row * down, right, NULL, down, along, deep, stride, 0, 0, add};
        if (along != 1) {
            pack_left(packed, block.left, along, deep, height);
            block.left = packed, block.down = 1, block.along = STEP;
        }
        for (int64_t at = 0; at < columns; at += COLUMNS, block.right += panel) {
            block.out = out + row * stride + at, block.low = first(columns - at), block.high = first(columns - at - STEP);
            blocks[height - 1](&block);
        }
    }
}

void gemm_pack(float *to, const float *from, int64_t down, int64_t along, int64_t deep, int64_t columns)
{
    for (int64_t at = 0; at < columns; at += COLUMNS, to += deep * COLUMNS)
        if (along == 1)
            pack_rows(to, from + at, down, deep, columns - at);
        else
            pack_columns(to, from + at * along, along, deep, columns - at);
}

static int is_taken(const Matrix *out, const Matrix *left, const Matrix *right)
{
    return used && gemm_find() && left->sizes[0] >= FEW && right->sizes[1] >= STEP && left->sizes[1] > 0 &&
           out->sizes[0] == left->sizes[0] && left->sizes[1] == right->sizes[0] && out->sizes[1] == right->sizes[1] &&
           out->strides[1] == 1 && (left->strides[0] == 1 || left->strides[1] == 1) &&
           (right->strides[0] == 1 || right->strides[1] == 1);
}

int gemm(const Matrix *out, const Matrix *left, const Matrix *right, int add)
{
    static _Thread_local float packed[PACKED] __attribute__((aligned(64)));
    if (!is_taken(out, left, right))
        return 0;
    int64_t inner = left->sizes[1], columns = right->sizes[1], depths = (inner + DEEP - 1) / DEEP;
    for (int64_t depth = 0; depth < depths; depth++) {
        int64_t low = inner * depth / depths, deep = inner * (depth + 1) / depths - low;
        int64_t most = PACKED / deep / COLUMNS * COLUMNS;
        for (int64_t column = 0; column < columns; column += most) {
            int64_t count = columns - column < most ? columns - column : most;
            const float *from = (const float *)right->address + low * right->strides[0] + column * right->strides[1];
            const float *rows = (const float *)left->address + low * left->strides[1];
            gemm_pack(packed, from, right->strides[0], right->strides[1], deep, count);
            gemm_packed((float *)out->address + column, out->strides[0], rows, left->strides[0], left->strides[1],
                        left->sizes[0], packed, deep * COLUMNS, deep, count, add || depth > 0);
        }
    }
    return 1;
}

#else

int gemm_find(void) { return 0; }

int gemm_use(int use) { return use; }

int gemm(const Matrix *out, const Matrix *left, const Matrix *right, int add)
{
    (void)out, (void)left, (void)right, (void)add;
    return 0;
}

void gemm_pack(float *to, const float *from, int64_t down, int64_t along, int64_t deep, int64_t columns)
{
    (void)to, (void)from, (void)down, (void)along, (void)deep, (void)columns;
}

void gemm_packed(float *out, int64_t stride, const float *left, int64_t down, int64_t along, int64_t rows,
                 const float *right, int64_t panel, int64_t deep, int64_t columns, int add)
{
    (void)out, (void)stride, (void)left, (void)down, (void)along, (void)rows;
    (void)right, (void)panel, (void)deep, (void)columns, (void)add;
}

#endif
