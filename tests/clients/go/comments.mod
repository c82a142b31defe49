// The last releases before 3.43 end a stream at a block that holds only a comment.
module prfaas/tests/clients

go 1.26

require github.com/openai/openai-go/v3 v3.30.0

require (
	github.com/tidwall/gjson v1.18.0 // indirect
	github.com/tidwall/match v1.1.1 // indirect
	github.com/tidwall/pretty v1.2.1 // indirect
	github.com/tidwall/sjson v1.2.5 // indirect
)
