/* Lets each thread read a product's rows in long runs. ggml cuts rows and columns into chunks, which threads take in
   turn: each jumps over what the others read, and where memory is far away half of its time is spent on jumps; and it
   goes through all rows again for the next few columns. What a product is does not depend on who computes which rows,
   so no bit changes. Called in the copies that CMakeLists.txt makes of ggml's files; force-included. */

#ifndef GGUFPY_RUNS_H
#define GGUFPY_RUNS_H

#include <stdint.h>

enum {
    GGUFPY_CHUNKS_PER_THREAD = 4, /* so that a thread that is late, or on a slower core, leaves some to others */
};

static inline int64_t ggufpy_cut(int64_t n, int64_t chunk_size) {
    return (n + chunk_size - 1) / chunk_size;
}

/* Returns into how many chunks to cut the columns that ggml would cut into chunks of `chunk_size`: one, where there are
   rows enough to share. An odd number of columns, of an even one, may choose kernels: there ggml's chunks stay. */
static inline int64_t ggufpy_n_chunks_of_columns(int64_t n_rows, int64_t n_columns, int64_t chunk_size, int64_t n_threads) {
    const int64_t n = ggufpy_cut(n_columns, chunk_size);
    const int stays = n_columns % 2 == 0 && ggufpy_cut(n_columns, n) % 2 != 0;
    return stays || ggufpy_cut(n_rows, chunk_size) < GGUFPY_CHUNKS_PER_THREAD * n_threads ? n : 1;
}

/* Returns the same for the rows: where columns are not divided no more chunks than threads need to share them, of one
   column's any number, else of whole chunks, whose size may choose kernels. */
static inline int64_t ggufpy_n_chunks_of_rows(int64_t n_rows, int64_t n_columns, int64_t chunk_size, int64_t n_threads) {
    const int64_t n = ggufpy_cut(n_rows, chunk_size), enough = GGUFPY_CHUNKS_PER_THREAD * n_threads;
    if (n <= enough || ggufpy_n_chunks_of_columns(n_rows, n_columns, chunk_size, n_threads) > 1) {
        return n;
    }
    if (n_columns == 1) {
        return enough;
    }
    if (n_rows % chunk_size == 0) {
        for (int64_t fewer = enough; fewer < n && fewer <= 4 * enough; fewer += n_threads) {
            if (n % fewer == 0) {
                return fewer;
            }
        }
    }
    return n;
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
