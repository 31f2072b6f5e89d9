/* Cures AMX for gcc: its older _tile_loadconfig names only 8 of the 64 bytes of the configuration as read, so the
   compiler may drop the other stores before it, and the first tile load is an illegal instruction. Force-included. */

#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg\t%X0" :: "m"(*(const char (*)[64]) (config)))
#endif
