#include "crew.hpp"

#include "memory.hpp"

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <sched.h>
#endif

namespace eagle {
namespace {
constexpr size_t SEATS = 256;      // threads that may help, at most
constexpr size_t AHEAD = 1 << 17;  // bytes that a waiting thread fetches: a quarter of a core's own cache
constexpr int SPINS = 50000;       // waits of some ten nanoseconds before others may have the processor

inline void wait_a_little(int* spins) {
  if (++*spins > SPINS) {
#if defined(_WIN32)
    SwitchToThread();
#else
    sched_yield();
#endif
    return;
  }
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Crew {
 public:
  Crew(Phase* phases, int64_t count, size_t scratch, uint8_t* mine)
      : phases_(phases), count_(count), scratch_(scratch), mine_(mine) {
    open_after(-1, mine);
  }
  bool ended() const { return open() >= count_; }

  // Helps until all phases are done. A thread without memory of its own leaves the work to others; the first has some.
  void help() {
    if (ended()) return;
    Memory own(Use::PASS);
    uint8_t* scratch = mine_;
    if (__atomic_fetch_add(&threads_, 1, __ATOMIC_RELAXED) > 0 && (scratch = own.get(scratch_)) == nullptr) return;
    for (int64_t p; (p = open()) < count_;) {
      compute(p, scratch);
      wait_for_the_end_of(p);
    }
  }

 private:
  // A share of what is left at a time: large pieces of memory are read in one go, and small ones even out the end.
  void compute(int64_t p, uint8_t* scratch) {
    Phase& phase = phases_[p];
    int64_t first = __atomic_load_n(&phase.progress.claimed, __ATOMIC_RELAXED);
    while (first < phase.pieces) {
      const int64_t threads = __atomic_load_n(&threads_, __ATOMIC_RELAXED);
      const int64_t share = (phase.pieces - first) / (threads > 1 ? threads : 2);  // the second will soon be here
      const int64_t last = first + (share > 1 ? share : 1);
      if (!__atomic_compare_exchange_n(&phase.progress.claimed, &first, last, false, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED))
        continue;
      phase.run(phase.work, first, last, scratch);
      if (__atomic_add_fetch(&phase.progress.done, last - first, __ATOMIC_ACQ_REL) == phase.pieces)
        return open_after(p, scratch);
      first = __atomic_load_n(&phase.progress.claimed, __ATOMIC_RELAXED);
    }
  }

  void wait_for_the_end_of(int64_t p) const {
    const uint8_t *at = nullptr, *end = nullptr;
    for (int64_t next = p + 1; next < count_ && at == nullptr; next++)
      at = phases_[next].read, end = at + bytes_ahead(next);
    for (int spins = 0; open() == p;) {
      if (at == end) wait_a_little(&spins);
      for (int i = 0; i < 4 && at < end; i++, at += ALIGNMENT) __builtin_prefetch(at);
    }
  }
  size_t bytes_ahead(int64_t p) const {
    const size_t bytes = phases_[p].read_bytes / ALIGNMENT * ALIGNMENT;
    return bytes < AHEAD ? bytes : AHEAD;
  }
  int64_t open() const { return __atomic_load_n(&open_, __ATOMIC_ACQUIRE); }

  void open_after(int64_t p, uint8_t* scratch) {
    while (++p < count_ && phases_[p].alone) phases_[p].run(phases_[p].work, 0, phases_[p].pieces, scratch);
    __atomic_store_n(&open_, p, __ATOMIC_RELEASE);
  }

  Phase* phases_;
  int64_t count_;
  size_t scratch_;
  uint8_t* mine_;
  alignas(64) int64_t open_ = 0;
  alignas(64) int64_t threads_ = 0;  // that have come
};
}  // namespace

ort::Status run_phases(void* context, Phase* phases, int64_t count, size_t scratch, uint8_t* mine) {
  Crew crew(phases, count, scratch, mine);
  if (crew.ended()) return nullptr;
  auto help = [](void* all, size_t) { static_cast<Crew*>(all)->help(); };
  return ort::call(ort::PARALLEL_FOR, context, static_cast<void (*)(void*, size_t)>(help), SEATS, size_t(0),
                   static_cast<void*>(&crew));
}
}  // namespace eagle
