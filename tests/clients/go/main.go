// Command clients is openai-go, as a program: see tests/clients/programs.py. It is built with each of the two go.mod.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"os"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
)

type request struct {
	URL   string          `json:"url"`
	API   string          `json:"api"`
	Body  json.RawMessage `json:"body"`
	Extra map[string]any  `json:"extra"`
}

type choice struct {
	Text         string   `json:"text"`
	Tokens       []string `json:"tokens"`
	FinishReason string   `json:"finish_reason"`
}

type seen struct {
	Choices []choice `json:"choices"`
	Chunks  int      `json:"chunks"`
	Usage   []int64  `json:"usage"`
	Status  int      `json:"status"`
	Error   string   `json:"error"`
}

func say(line any) {
	if err := json.NewEncoder(os.Stdout).Encode(line); err != nil {
		panic(err)
	}
}

// read calls add with each chunk of a stream.
func (s *seen) read(stream interface{ Next() bool }, add func()) {
	for stream.Next() {
		if s.Chunks == 0 {
			say(map[string]bool{"begun": true})
		}
		s.Chunks++
		add()
	}
}

// note keeps the usage, which is empty where none came.
func (s *seen) note(usage openai.CompletionUsage) {
	if usage.TotalTokens > 0 {
		s.Usage = []int64{usage.PromptTokens, usage.CompletionTokens}
	}
}

func (s *seen) askChat(client openai.Client, body []byte, streamed bool, options []option.RequestOption) error {
	var params openai.ChatCompletionNewParams
	if err := json.Unmarshal(body, &params); err != nil {
		return err
	}
	var answer *openai.ChatCompletion
	if streamed {
		stream := client.Chat.Completions.NewStreaming(context.Background(), params, options...)
		var accumulated openai.ChatCompletionAccumulator
		taken := true
		s.read(stream, func() { taken = accumulated.AddChunk(stream.Current()) && taken })
		if err := stream.Err(); err != nil {
			return err
		}
		if !taken {
			return errors.New("a chunk does not belong to the chunks before")
		}
		answer = &accumulated.ChatCompletion
	} else {
		var err error
		if answer, err = client.Chat.Completions.New(context.Background(), params, options...); err != nil {
			return err
		}
	}
	for _, one := range answer.Choices {
		shown := choice{one.Message.Content, []string{}, string(one.FinishReason)}
		for _, token := range one.Logprobs.Content {
			shown.Tokens = append(shown.Tokens, token.Token)
		}
		s.Choices = append(s.Choices, shown)
	}
	s.note(answer.Usage)
	return nil
}

func (s *seen) askCompletions(client openai.Client, body []byte, streamed bool, options []option.RequestOption) error {
	var params openai.CompletionNewParams
	if err := json.Unmarshal(body, &params); err != nil {
		return err
	}
	if !streamed {
		answer, err := client.Completions.New(context.Background(), params, options...)
		if err == nil {
			s.add(*answer)
		}
		return err
	}
	stream := client.Completions.NewStreaming(context.Background(), params, options...)
	s.read(stream, func() { s.add(stream.Current()) })
	return stream.Err()
}

func (s *seen) add(chunk openai.Completion) {
	for _, one := range chunk.Choices {
		for int(one.Index) >= len(s.Choices) {
			s.Choices = append(s.Choices, choice{Tokens: []string{}})
		}
		shown := &s.Choices[one.Index]
		shown.Text += one.Text
		shown.Tokens = append(shown.Tokens, one.Logprobs.Tokens...)
		if one.FinishReason != "" {
			shown.FinishReason = string(one.FinishReason)
		}
	}
	s.note(chunk.Usage)
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var asked request
		var body struct{ Stream bool }
		if err := errors.Join(json.Unmarshal(lines.Bytes(), &asked), json.Unmarshal(asked.Body, &body)); err != nil {
			panic(err)
		}
		client := openai.NewClient(option.WithBaseURL(asked.URL), option.WithAPIKey("none"), option.WithMaxRetries(0))
		options := []option.RequestOption{}
		for name, value := range asked.Extra {
			options = append(options, option.WithJSONSet(name, value))
		}
		found := seen{Choices: []choice{}, Status: 200}
		ask := found.askCompletions
		if asked.API == "chat" {
			ask = found.askChat
		}
		if err := ask(client, asked.Body, body.Stream, options); err != nil {
			found.Error, found.Status = err.Error(), 0
			var refused *openai.Error
			if errors.As(err, &refused) {
				found.Status = refused.StatusCode
			}
		}
		say(found)
	}
}
