// Libraries that are found at run time and never linked.
#pragma once

#include <string>
#include <vector>

namespace hisparse::host {

class SharedLibrary {
 public:
  SharedLibrary() = default;

  // The first of `candidates` (paths or sonames) that loads, for the rest of the process. Raises
  // std::runtime_error with the loader's words for each where none does.
  static SharedLibrary open(const std::vector<std::string>& candidates);

  void* symbol(const char* name) const;           // null where there is none
  void* required_symbol(const char* name) const;  // std::runtime_error where there is none
  std::string path() const;                       // the file that was loaded

 private:
  std::string name_;
  void* handle_ = nullptr;
};

// The path of a library that this process has mapped already and whose file name starts with `prefix`, or "".
std::string mapped_library(const std::string& prefix);

// The folder of packages that this extension was installed into, or "".
std::string package_folder();

}  // namespace hisparse::host
