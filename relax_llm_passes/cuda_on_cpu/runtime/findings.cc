// What the checks found, one entry per kind, kernel and place.
#include <dlfcn.h>

#include <cstdio>
#include <map>
#include <tuple>

#include "runtime.h"

namespace emu {

struct Finding {
  std::string kind, kernel, text, library;
  unsigned line;
  uint64_t offset;  // of the instruction in `library`, when there is no line
  uint64_t count;
};
static std::vector<Finding> findings;
static std::map<std::tuple<std::string, std::string, uint64_t>, size_t> known;
constexpr size_t MOST_FINDINGS = 1000;

std::string thread_name(int linear) {
  unsigned x = emu_context.block_size.x, y = emu_context.block_size.y;
  char s[64];
  snprintf(s, sizeof s, "thread (%u,%u,%u)", linear % x, linear / x % y, linear / x / y);
  return s;
}

static bool seen(const char* kind, uint64_t place) {
  auto [it, fresh] = known.try_emplace({kind, current.kernel, place}, findings.size());
  if (fresh) return findings.size() >= MOST_FINDINGS;
  if (it->second < findings.size()) findings[it->second].count++;
  return true;
}

void finding(const char* kind, const std::string& text, EmuSite site) {
  if (seen(kind, site)) return;
  findings.push_back({kind, current.kernel, text, "", site & 0xfffff, 0, 1});
}

void finding_at(const char* kind, const std::string& text, void* instruction) {
  if (((uint64_t)instruction >> 56) == (SITE_MARK >> 56)) {
    finding(kind, text, (EmuSite)((uint64_t)instruction >> 1));
    return;
  }
  if (seen(kind, (uint64_t)instruction)) return;
  Dl_info info{};
  std::string library;
  uint64_t offset = 0;
  if (dladdr(instruction, &info) && info.dli_fname) {
    library = info.dli_fname;
    offset = (char*)instruction - (char*)info.dli_fbase;
  }
  findings.push_back({kind, current.kernel, text, library, 0, offset, 1});
}

static std::string quoted(const std::string& s) {
  std::string r = "\"";
  for (char c : s) {
    if (c == '"' || c == '\\') r += '\\';
    if ((unsigned char)c < 0x20) c = ' ';
    r += c;
  }
  return r + "\"";
}

std::string findings_json() {
  std::string s = "[";
  for (const Finding& f : findings) {
    if (s.size() > 1) s += ",";
    s += "{\"kind\":" + quoted(f.kind) + ",\"kernel\":" + quoted(f.kernel) + ",\"text\":" +
         quoted(f.text) + ",\"library\":" + quoted(f.library) + ",\"line\":" +
         std::to_string(f.line) + ",\"offset\":" + std::to_string(f.offset) + ",\"count\":" +
         std::to_string(f.count) + "}";
  }
  return s + "]";
}

void clear_findings() {
  findings.clear();
  known.clear();
}

}  // namespace emu
