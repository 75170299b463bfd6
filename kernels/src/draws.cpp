// What the host does for a draw at a temperature: the exponential random numbers of a position, and the tokens that may win.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "operators.hpp"

namespace {
// Where the strips of a ziggurat under exp(-x) end (Marsaglia and Tsang 2000, 256 strips of one area): the numbers that
// NumPy's Generator.standard_exponential is made with, so that both make the same. tests/kernels/test_draws.py computes them.
constexpr double ENDS[256] = {
    0x1.164ec94bf5dc1p3,  0x1.0589d8b5d4119p-4, 0x1.ad6b2495b4d2bp-4, 0x1.19335a95b8dbap-3, 0x1.522e6e54a2a73p-3,
    0x1.85090fbc27a8p-3,  0x1.b38d1ef79b7ccp-3, 0x1.decd8b76dbd98p-3, 0x1.03bf049c65c3cp-2, 0x1.170db24d6f67p-2,
    0x1.2980290da2633p-2, 0x1.3b388fe3d6ecap-2, 0x1.4c515c60bfe21p-2, 0x1.5cdf89d024ac3p-2, 0x1.6cf40f0a72bbdp-2,
    0x1.7c9cdda17d019p-2, 0x1.8be5954d3606fp-2, 0x1.9ad80552237d2p-2, 0x1.a97c8be5d5203p-2, 0x1.b7da5dddda3c4p-2,
    0x1.c5f7bd78c3f89p-2, 0x1.d3da24df17c36p-2, 0x1.e186678f1735ap-2, 0x1.ef00ccf5f4faap-2, 0x1.fc4d25d683209p-2,
    0x1.04b76ed6a7558p-1, 0x1.0b348479b80fcp-1, 0x1.119f38749f5afp-1, 0x1.17f8ceb4bdfap-1,  0x1.1e426e93e49e7p-1,
    0x1.247d26538ff2ep-1, 0x1.2aa9ee123680bp-1, 0x1.30c9aa526da4bp-1, 0x1.36dd2e26d8202p-1, 0x1.3ce53d12162ap-1,
    0x1.42e28ca706748p-1, 0x1.48d5c5f35e712p-1, 0x1.4ebf86bcd0b93p-1, 0x1.54a0629786f4dp-1, 0x1.5a78e3db8befdp-1,
    0x1.60498c7dd2ecfp-1, 0x1.6612d6d0c68ep-1,  0x1.6bd5362faa944p-1, 0x1.71911797990bbp-1, 0x1.7746e23077973p-1,
    0x1.7cf6f7c7e8172p-1, 0x1.82a1b53fed599p-1, 0x1.884772f2be1ecp-1, 0x1.8de8850d0c52ap-1, 0x1.93853bdfda244p-1,
    0x1.991de42ad1338p-1, 0x1.9eb2c75ff03bfp-1, 0x1.a4442be14884ap-1, 0x1.a9d255396d261p-1, 0x1.af5d844f224c9p-1,
    0x1.b4e5f794c979bp-1, 0x1.ba6beb33f8f89p-1, 0x1.bfef99359fe99p-1, 0x1.c57139a70d29fp-1, 0x1.caf102bc25adbp-1,
    0x1.d06f28ef0e6fbp-1, 0x1.d5ebdf1d86b8dp-1, 0x1.db6756a429057p-1, 0x1.e0e1bf77c31fep-1, 0x1.e65b483cf1044p-1,
    0x1.ebd41e5e21b62p-1, 0x1.f14c6e202949fp-1, 0x1.f6c462b57feb5p-1, 0x1.fc3c26504a9a1p-1, 0x1.00d9f119a3cd9p0,
    0x1.0395df60db162p0,  0x1.0651f1c7276f8p0,  0x1.090e3bb4b0072p0,  0x1.0bcad03710137p0,  0x1.0e87c207a2f66p0,
    0x1.114523917ac15p0,  0x1.140306f707dbep0,  0x1.16c17e1777ffbp0,  0x1.19809a93d2396p0,  0x1.1c406dd3d5283p0,
    0x1.1f01090a9c4e2p0,  0x1.21c27d3b10e05p0,  0x1.2484db3c2a329p0,  0x1.274833bd0189fp0,  0x1.2a0c9748bcdaap0,
    0x1.2cd2164a53b5dp0,  0x1.2f98c11031721p0,  0x1.3260a7cfb7611p0,  0x1.3529daa8a1ba1p0,  0x1.37f469a851afp0,
    0x1.3ac064ccfeffcp0,  0x1.3d8ddc08d336dp0,  0x1.405cdf44f09c4p0,  0x1.432d7e6466cdp0,   0x1.45ffc94716ca7p0,
    0x1.48d3cfcc883c4p0,  0x1.4ba9a1d6b18a4p0,  0x1.4e814f4cb45eap0,  0x1.515ae81d900fbp0,  0x1.54367c42cb5f8p0,
    0x1.57141bc316f27p0,  0x1.59f3d6b4e9cf9p0,  0x1.5cd5bd4119335p0,  0x1.5fb9dfa56cf26p0,  0x1.62a04e3731a2ep0,
    0x1.65891965c9b8cp0,  0x1.687451bd3ebeep0,  0x1.6b6207e8d3cdfp0,  0x1.6e524cb59a608p0,  0x1.714531150a9fbp0,
    0x1.743ac61fa041cp0,  0x1.77331d177d13p0,   0x1.7a2e476b1240ap0,  0x1.7d2c56b7d17f7p0,  0x1.802d5ccce7277p0,
    0x1.83316badfe62ap0,  0x1.86389596108e7p0,  0x1.8942ecfa40f54p0,  0x1.8c50848cc6094p0,  0x1.8f616f3fe1513p0,
    0x1.9275c048e73e1p0,  0x1.958d8b235828ap0,  0x1.98a8e3940bbf4p0,  0x1.9bc7ddac7035dp0,  0x1.9eea8dcdde951p0,
    0x1.a21108ad0592dp0,  0x1.a53b63556c69p0,   0x1.a869b32d0f30fp0,  0x1.ab9c0df81657ap0,  0x1.aed289dcaacffp0,
    0x1.b20d3d66e8bb5p0,  0x1.b54c3f8cf2542p0,  0x1.b88fa7b324fb6p0,  0x1.bbd78db07261p0,   0x1.bf2409d2dfd85p0,
    0x1.c27534e42e02dp0,  0x1.c5cb282eab1a4p0,  0x1.c925fd82323fbp0,  0x1.cc85cf395a56cp0,  0x1.cfeab83ed718p0,
    0x1.d354d4130f2adp0,  0x1.d6c43ed1ea3fep0,  0x1.da391538da50ap0,  0x1.ddb374ad2357fp0,  0x1.e1337b426509bp0,
    0x1.e4b947c16a452p0,  0x1.e844f9af4237fp0,  0x1.ebd6b154a7678p0,  0x1.ef6e8fc5b9168p0,  0x1.f30cb6ea0bc7fp0,
    0x1.f6b1498515edp0,   0x1.fa5c6b3efe1e5p0,  0x1.fe0e40add09d8p0,  0x1.00e377af911d4p1,  0x1.02c34ef11391bp1,
    0x1.04a6b9e9224a3p1,  0x1.068dccf1126dbp1,  0x1.08789cf3aad0fp1,  0x1.0a673f733c819p1,  0x1.0c59ca900946fp1,
    0x1.0e50550efcfb7p1,  0x1.104af660befcep1,  0x1.1249c6a92154ap1,  0x1.144cdec6f3a2bp1,  0x1.1654585c404c1p1,
    0x1.18604dd6fae9ep1,  0x1.1a70da7a2782p1,   0x1.1c861a6782a5ap1,  0x1.1ea02aa9b337p1,   0x1.20bf293f0f4a2p1,
    0x1.22e33524fe55p1,   0x1.250c6e6403bbap1,  0x1.273af61c7daa6p1,  0x1.296eee942532bp1,  0x1.2ba87b445db51p1,
    0x1.2de7c0e962d7p1,   0x1.302ce59265965p1,  0x1.327810b2aa7dp1,   0x1.34c96b33bc965p1,  0x1.37211f88ca856p1,
    0x1.397f59c345143p1,  0x1.3be447a8d8b83p1,  0x1.3e5018caddedp1,   0x1.40c2fe9f5eeadp1,  0x1.433d2c9bd42f8p1,
    0x1.45bed851bc92cp1,  0x1.4848398d39432p1,  0x1.4ad98a75da14cp1,  0x1.4d7307b1cb127p1,  0x1.5014f08b99508p1,
    0x1.52bf871acaab2p1,  0x1.5573106f8a75ap1,  0x1.582fd4c1b4461p1,  0x1.5af61fa38e107p1,  0x1.5dc640388bd9ep1,
    0x1.60a0897081879p1,  0x1.63855247b2e94p1,  0x1.6674f60c3f432p1,  0x1.696fd4a9748eep1,  0x1.6c7652f9a7b1ep1,
    0x1.6f88db1f42507p1,  0x1.72a7dce5cd218p1,  0x1.75d3ce2bd71c3p1,  0x1.790d2b56b71f9p1,  0x1.7c5477d1476d3p1,
    0x1.7faa3e96e1412p1,  0x1.830f12cc0bec3p1,  0x1.8683906687342p1,  0x1.8a085ce695babp1,  0x1.8d9e2823b3695p1,
    0x1.9145ad2f37544p1,  0x1.94ffb34fc2a0ep1,  0x1.98cd0f18d1ad8p1,  0x1.9caea3a24d9eap1,  0x1.a0a563e49f178p1,
    0x1.a4b2543e84c3bp1,  0x1.a8d68c2ad86eap1,  0x1.ad13382d845c4p1,  0x1.b1699c003b60ap1,  0x1.b5db15091ea0fp1,
    0x1.ba691d276da5ep1,  0x1.bf154de4bef77p1,  0x1.c3e1641c2e0a7p1,  0x1.c8cf442c8c8f4p1,  0x1.cde0fecf2a97fp1,
    0x1.d318d6b2738c5p1,  0x1.d87946fec3becp1,  0x1.de050af4ef19fp1,  0x1.e3bf26e19096p1,   0x1.e9aaf2af383c1p1,
    0x1.efcc26750ea4ap1,  0x1.f626e9791f7a7p1,  0x1.fcbfe43f6c6e5p1,  0x1.01ce2b362ec2ep2,  0x1.056118bf58eefp2,
    0x1.091c1cdcba54ep2,  0x1.0d031785d48ap2,   0x1.111a8034392a6p2,  0x1.156786775442ap2,  0x1.19f03bcb3c2d6p2,
    0x1.1ebbca0c9fa7cp2,  0x1.23d2bb659919fp2,  0x1.293f5ae49aaa5p2,  0x1.2f0e38a4411fp2,   0x1.354ee27ccf75ep2,
    0x1.3c14ec7c8b861p2,  0x1.4379766e41362p2,  0x1.4b9d7cd4751d1p2,  0x1.54ad83ccf73f6p2,  0x1.5ee7ae17313d2p2,
    0x1.6aa676d4bbf72p2,  0x1.78750d6eac62fp2,  0x1.8939fe6f2ed19p2,  0x1.9e9dc0d487b85p2,  0x1.bc39e51da71fcp2,
    0x1.ec9d9297ebb83p2};
constexpr double TAIL = ENDS[255];
constexpr double UNIT = 0x1p-53;  // of a random number of 53 bits
constexpr int WORDS = 512, GROUP = 8;

struct Ziggurat {
  double width[256], height[256];
  uint64_t inside[256];  // numbers below it lie under the curve
  Ziggurat() {
    for (int i = 0; i < 256; i++) {
      width[i] = ENDS[i] * UNIT;
      height[i] = i ? exp(-ENDS[i]) : 1.0;
      inside[i] = i == 1 ? 0 : uint64_t((i ? ENDS[i - 1] : TAIL) / ENDS[i] / UNIT);
    }
  }
};
const Ziggurat ZIGGURAT;

// The words of Philox 4x64 with ten rounds (Salmon et al. 2011), for the key (seed, 0), after the counter (0, 0, 0, position).
struct Philox {
  Philox(uint64_t key, uint64_t counter) : seed(key), position(counter) {}
  const uint64_t seed, position;
  uint64_t block = 0, words[WORDS];
  int at = WORDS;

  void refill() {
    for (int i = 0; i < WORDS; i += 4) {
      uint64_t a = ++block, b = 0, c = 0, d = position, key = seed, other = 0;
#pragma GCC unroll 10
      for (int round = 0; round < 10; round++) {
        const unsigned __int128 first = static_cast<unsigned __int128>(0xD2E7470EE14C6C93u) * a;
        const unsigned __int128 second = static_cast<unsigned __int128>(0xCA5A826395121157u) * c;
        a = uint64_t(second >> 64) ^ b ^ key, b = uint64_t(second);
        c = uint64_t(first >> 64) ^ d ^ other, d = uint64_t(first);
        key += 0x9E3779B97F4A7C15u, other += 0xBB67AE8584CAA73Bu;
      }
      words[i] = a, words[i + 1] = b, words[i + 2] = c, words[i + 3] = d;
    }
    at = 0;
  }
  uint64_t next() {
    if (at == WORDS) refill();
    return words[at++];
  }
};

constexpr int64_t BLOCK = 64;  // tokens that are looked at together

inline int32_t exponent(double number) {
  uint64_t bits;
  memcpy(&bits, &number, sizeof bits);
  return int32_t(bits >> 52);
}
}  // namespace

// Writes `count` exponential random numbers of a position: those of NumPy's Generator(Philox(counter=[0, 0, 0, position],
// key=seed)).standard_exponential(count).
EXPORTED void eagle_exponential_noise(uint64_t seed, uint64_t position, int64_t count, double* out) {
  const Ziggurat& zig = ZIGGURAT;
  Philox philox(seed, position);
  for (double* const end = out + count; out < end;) {
    if (philox.at + GROUP <= WORDS && out + GROUP <= end) {
      const uint64_t* words = philox.words + philox.at;
      unsigned outside = 0;
#pragma GCC unroll 8
      for (int i = 0; i < GROUP; i++) {
        const int strip = int(words[i] >> 3 & 255);
        out[i] = double(int64_t(words[i] >> 11)) * zig.width[strip];
        outside |= unsigned(words[i] >> 11 >= zig.inside[strip]) << i;
      }
      const int sure = outside ? __builtin_ctz(outside) : GROUP;
      philox.at += sure, out += sure;
      if (!outside) continue;
    }
    const uint64_t word = philox.next(), number = word >> 11;
    const int strip = int(word >> 3 & 255);
    double x = double(int64_t(number)) * zig.width[strip];
    if (number >= zig.inside[strip]) {
      const double share = double(int64_t(philox.next() >> 11)) * UNIT;
      if (strip == 0) x = TAIL - log1p(-share);
      else if (!((zig.height[strip - 1] - zig.height[strip]) * share + zig.height[strip] < exp(-x))) continue;
    }
    *out++ = x;
  }
}

// Writes the tokens that may have logit * factor - log(number) >= least, in ascending order, and some that are below it by
// less than one; returns how many. A number's logarithm is taken to be that of the power of two below it. Computed in fp32:
// scores, logit * factor, are to be below 1000. numbers: positive and normal.
EXPORTED int64_t eagle_contenders(const float* logits, const double* numbers, int64_t count, float factor, float least,
                                  int64_t* out) {
  constexpr float LOG2 = 0.69314718f;
  const float start = least - 1023 * LOG2 - 0.01f;
  int64_t found = 0;
  for (int64_t first = 0; first < count; first += BLOCK) {
    const int64_t size = first + BLOCK < count ? BLOCK : count - first;
    int32_t exponents[BLOCK], may[BLOCK], any = 0;
    if (size == BLOCK) {
      for (int64_t i = 0; i < BLOCK; i++) exponents[i] = exponent(numbers[first + i]);
      for (int64_t i = 0; i < BLOCK; i++) may[i] = logits[first + i] * factor - float(exponents[i]) * LOG2 >= start;
      for (int64_t i = 0; i < BLOCK; i++) any |= may[i];
      if (!any) continue;
    }
    for (int64_t i = 0; i < size; i++)
      if (logits[first + i] * factor - float(exponent(numbers[first + i])) * LOG2 >= start) out[found++] = first + i;
  }
  return found;
}
