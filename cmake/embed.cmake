# Writes the bytes of IN as the array nbi_openapi_json to OUT. Run as a script by the build.
file(READ ${IN} bytes HEX)
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
string(REGEX REPLACE "(0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,)" "\\1\n" bytes "${bytes}")
file(WRITE ${OUT} "#include \"server/openapi.h\"\n\nconst unsigned char nbi_openapi_json[] = {\n"
                  "${bytes}};\nconst size_t nbi_openapi_bytes = sizeof nbi_openapi_json;\n")
