// One pass as phases, which the session's threads compute together: a thread is woken once per pass and stays.
#pragma once
#include "ort.hpp"

namespace eagle {

// Pieces that may be computed in any order and by any threads, after all of the phase before.
struct Phase {
  void (*run)(const void* work, int64_t first, int64_t last, uint8_t* scratch);  // pieces first .. last - 1
  const void* work;
  int64_t pieces;
  bool alone;           // by the thread that ended the phase before: too small to be shared
  const uint8_t* read;  // memory that is read from here on, or null: threads that wait for the phase fetch some of it
  size_t read_bytes;
  struct alignas(64) Progress {
    int64_t claimed, done;
  } progress;
};

// Computes phases one after the other; returns when all are done. scratch: bytes that each thread gets for its own, of
// which `mine` is the first thread's. Threads claim pieces, so one thread alone can do all, and one that comes late helps
// with what is left.
ort::Status run_phases(void* context, Phase* phases, int64_t count, size_t scratch, uint8_t* mine);

}  // namespace eagle
