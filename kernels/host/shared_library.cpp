#include "shared_library.h"

#include <dlfcn.h>
#include <link.h>

#include <filesystem>

#include "errors.h"

namespace hisparse::host {

SharedLibrary SharedLibrary::open(const std::vector<std::string>& candidates) {
  SharedLibrary library;
  std::string failures;
  for (const std::string& candidate : candidates) {
    library.handle_ = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library.handle_ != nullptr) {
      library.name_ = candidate;
      return library;
    }
    failures += (failures.empty() ? "" : "; ") + std::string(dlerror());
  }
  throw std::runtime_error(failures);
}

void* SharedLibrary::symbol(const char* name) const { return dlsym(handle_, name); }

void* SharedLibrary::required_symbol(const char* name) const {
  void* const found = symbol(name);
  if (found == nullptr) throw std::runtime_error(text(name_, " has no ", name, ": a newer driver is needed"));
  return found;
}

std::string SharedLibrary::path() const {
  link_map* map = nullptr;
  const bool is_known = dlinfo(handle_, RTLD_DI_LINKMAP, &map) == 0 && map->l_name != nullptr;
  return is_known && *map->l_name != '\0' ? map->l_name : name_;
}

std::string mapped_library(const std::string& prefix) {
  struct Search {
    const std::string& prefix;
    std::string found;
  } search{prefix, ""};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& search = *static_cast<Search*>(data);
        const std::string path = info->dlpi_name != nullptr ? info->dlpi_name : "";
        if (path.compare(path.rfind('/') + 1, search.prefix.size(), search.prefix) != 0) return 0;
        search.found = path;
        return 1;
      },
      &search);
  return search.found;
}

std::string package_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&package_folder), &info) == 0 || info.dli_fname == nullptr)
    return "";
  return std::filesystem::absolute(info.dli_fname).parent_path().parent_path().string();
}

}  // namespace hisparse::host
