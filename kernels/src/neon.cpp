#if defined(__aarch64__)
#endif
