/* Lets each thread read a product's rows in long runs. ggml cuts rows and columns into chunks, which threads take in
   turn: each jumps over what the others read, and where memory is far away half of its time is spent on jumps; and all
   rows are read once more for every 16 columns. What a product is does not depend on who computes which rows, so no bit
   changes. Called in the copies that CMakeLists.txt makes of ggml's files; force-included. */

#ifndef GGUFPY_RUNS_H
#define GGUFPY_RUNS_H

#include <stdint.h>

/* Chunks for each thread, so that one that is late, or on a slower core, leaves some to others. With fewer than four
   ggml cuts anew. */
enum { GGUFPY_CHUNKS_PER_THREAD = 4 };

/* Whether ggml has kernels for two rows and two columns, taken by chunks that have an even number of each. */
#if defined(__ARM_FEATURE_MATMUL_INT8)
enum { GGUFPY_KERNELS_FOR_PAIRS = 1 };
#else
enum { GGUFPY_KERNELS_FOR_PAIRS = 0 };
#endif

static inline int64_t ggufpy_ceil_div(int64_t n, int64_t size) {
    return (n + size - 1) / size;
}

/* Returns whether rows alone, which ggml would cut into chunks of `size`, are enough for threads to share, and may be
   cut anywhere. An even number of columns may be one of pairs. */
static inline int ggufpy_rows_are_enough(int64_t n_rows, int64_t n_columns, int64_t size, int64_t n_threads) {
    return ggufpy_ceil_div(n_rows, size) >= GGUFPY_CHUNKS_PER_THREAD * n_threads
        && !(GGUFPY_KERNELS_FOR_PAIRS && n_columns % 2 == 0);
}

/* Returns into how many chunks to cut the rows: more of them for more columns, as ggml has, so that none takes long. */
static inline int64_t ggufpy_n_chunks_of_rows(int64_t n_rows, int64_t n_columns, int64_t size, int64_t n_threads) {
    const int64_t n = ggufpy_ceil_div(n_rows, size);
    const int64_t enough = GGUFPY_CHUNKS_PER_THREAD * n_threads * ggufpy_ceil_div(n_columns, size);
    return enough < n && ggufpy_rows_are_enough(n_rows, n_columns, size, n_threads) ? enough : n;
}

/* Returns into how many chunks to cut the columns. */
static inline int64_t ggufpy_n_chunks_of_columns(int64_t n_rows, int64_t n_columns, int64_t size, int64_t n_threads) {
    return ggufpy_rows_are_enough(n_rows, n_columns, size, n_threads) ? 1 : ggufpy_ceil_div(n_columns, size);
}

/* Returns which chunk of a product's rows and columns is taken i-th. Where columns are not divided the chunks lie in as
   many runs as there are threads, which take from them in turn, so that threads of one speed mostly go on in the run
   they are in. Else ggml's order stays: threads that share columns need less of the rows each, which stays in their
   caches. */
static inline int64_t ggufpy_in_runs(int64_t i, int64_t n_of_rows, int64_t n_of_columns, int64_t n_threads) {
    const int64_t run = i % n_threads, longer = n_of_rows % n_threads;
    if (n_of_columns > 1) {
        return i;
    }
    return run * (n_of_rows / n_threads) + (run < longer ? run : longer) + i / n_threads;
}

#endif
