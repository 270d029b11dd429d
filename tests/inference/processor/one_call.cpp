// Runs one call of the attention from a file and writes its memory back: `one_call FILE`. The file holds
// the struct `Call`, whose pointers are places in the rest of the file.
#include <cstdio>
#include <vector>

#include "neon.cpp"

int main(int, char **arguments) {
    FILE *file = fopen(arguments[1], "r+b");
    fseek(file, 0, SEEK_END);
    std::vector<char> memory(ftell(file));
    rewind(file);
    if (fread(memory.data(), 1, memory.size(), file) != memory.size()) return 1;
    Call call;
    memcpy(&call, memory.data(), sizeof call);
    auto **pointers = reinterpret_cast<char **>(&call);
    for (int i = 0; i < 11; i++) pointers[i] = memory.data() + reinterpret_cast<size_t>(pointers[i]);
    if (!attend_neon(&call, 0, 0)) return 2;
    rewind(file);
    return fwrite(memory.data(), 1, memory.size(), file) != memory.size() || fclose(file);
}
